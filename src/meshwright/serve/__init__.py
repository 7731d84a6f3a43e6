"""Text from a model: the cache, sampling, generation from a run or a Hugging Face folder."""
