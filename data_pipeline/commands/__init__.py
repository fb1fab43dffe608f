"""One module per command of `data-pipeline`.

Only `data_pipeline/cli.py` imports them.
"""
