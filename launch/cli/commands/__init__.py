"""One module per command of ``lockstep``: its parser and what it does. Heavy imports stand inside ``run``."""
