"""What we claim, measured. Run through ``lockstep bench``; nothing of the product imports this."""
