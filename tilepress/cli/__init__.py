"""The `tilepress` command: app.py starts it, flags.py has what commands share, terminal.py the words on the screen."""
