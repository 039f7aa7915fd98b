"""``python -m hopon``: the same as the ``hopon`` command."""

from hopon.cli import main

if __name__ == "__main__":
    main()
