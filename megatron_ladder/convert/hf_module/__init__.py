"""The model as transformers runs it: the files of this folder are written, as they are, beside exported weights.

They import torch and transformers alone. Nothing else of the package imports them.
"""
