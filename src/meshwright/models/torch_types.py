"""What the PyTorch backend and its plans know of Hugging Face models; nothing of JAX."""

# by model_type: those whose parameters have named dims, and that are trained with masks of ours
WITH_DIMS = ("llama", "mistral", "qwen2", "qwen3")
TENSOR_DIMS = ("vocab", "heads", "kv_heads", "mlp")  # that tensor parallelism splits
