"""The model for transformers. Exported directories contain the files of this folder.

An exported file imports only torch and transformers; `convert/remote_code.py` writes the table of wirings into it. No
other module of the package imports this folder.
"""
