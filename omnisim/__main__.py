"""``python -m omnisim``."""

from omnisim.cli import main

if __name__ == "__main__":
    main()
