"""Layers of a decoder: attention, MLP, norm, rotary embedding, activation. Parallel linear layers are in parallel/."""
