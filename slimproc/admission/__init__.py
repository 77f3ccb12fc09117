"""Who may start, where, and when: the queues, one deadline a request, and what becomes of a request whose engine died."""
