"""Ops of ours, one file each: schema, fake, and a reference in plain torch."""
