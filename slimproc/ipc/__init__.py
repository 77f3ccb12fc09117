"""What crosses the border between the front and an engine, and the shared memory it crosses by."""
