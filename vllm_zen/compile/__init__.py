"""What vllm-zen adds to torch.compile."""
