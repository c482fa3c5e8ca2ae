"""hvdtrain trains image classifiers on many processes and explains what it got for them."""

__version__ = "0.2.0"
