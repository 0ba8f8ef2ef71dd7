"""Result files of other tools, read into our names."""
