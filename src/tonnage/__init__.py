"""Says to the byte what every GPU will hold of a language model, before anything is loaded."""
