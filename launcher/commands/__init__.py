"""One module per command of `launcher`.

Only `launcher/cli.py` imports them; they may use every other module of the launcher.
"""
