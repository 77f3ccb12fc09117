"""Which models are in memory: probes measure, the ledger keeps holds, planning decides, the manager acts."""
