"""gpubench: how fast does it run, why is it not faster, will it fit, and did the change help?"""

__version__ = "0.2.0"
