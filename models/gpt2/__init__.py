"""GPT-2 (Radford et al. 2019) and Megatron-LM's models of its form: a causal language model."""
