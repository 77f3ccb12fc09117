"""``python -m slimproc``."""

from slimproc.cli import main

if __name__ == "__main__":
    main()
