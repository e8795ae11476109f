"""What the contract gives to others: a file to fill, and definitions for FlashInfer-Bench."""
