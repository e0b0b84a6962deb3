"""Values on disk: a folder of safetensors that stays valid whatever happens to its writer."""
