"""What the machine's memory is, device by device: a child process samples it."""
