"""Models that are served by processes other than our engines: started by us (``command``) or already there (``remote``)."""
