"""The layers of a decoder that are not a cut linear: attention, MLP, norm, rotary embedding, activation."""
