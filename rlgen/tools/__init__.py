"""Functions that the model may call between its turns: their schemas, the formats of calls, and the processes that run them."""
