"""``slimproc chaos``: a server under a mixed load with faults, all from one seed, and what must be true of it all along."""
