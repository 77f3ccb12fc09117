"""Chat templates: rendered in a child process, with control tokens coming from the template alone."""
