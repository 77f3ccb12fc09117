"""Who may start, where, and when: the queues, one deadline per request, and what becomes of a request whose engine died."""
