"""Custom ops of ours, one file each: schema, fake, reference in plain torch, and the Triton kernel."""
