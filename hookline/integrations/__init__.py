"""hookline in other frameworks: lightning, transformers, tensorboard, wandb, ray; one file each."""
