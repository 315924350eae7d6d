"""Do engine and trainer compute with the same weights, and do their log-probs mean the same?"""
