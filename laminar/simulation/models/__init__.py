"""Hardware, language models, data, engine, trainer and relays as formulas: time is passed in, nothing waits."""
