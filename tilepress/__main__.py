"""`python -m tilepress`."""

from tilepress.cli import main

main()
