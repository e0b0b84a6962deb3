"""The first producer of a NaN or an infinity: found, told, written down and run again."""
