"""What models are made of: attention, rotary embedding, norms, the fused cross-entropy."""
