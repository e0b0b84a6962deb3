"""hookline inside other libraries, each of which is loaded only with its own file here.

- `lightning`: callbacks for Lightning's Trainer
- `transformers`: callbacks for the Trainer of transformers
- `tensorboard`, `wandb`: writers for `watch`
"""
