"""`python -m tilepress`."""

from tilepress.cli.app import main

main()
