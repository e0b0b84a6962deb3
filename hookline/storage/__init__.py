"""Values on disk: a folder of safetensors that is sound whatever happens to its writer."""
