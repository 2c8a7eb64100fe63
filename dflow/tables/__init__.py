"""Variables divided into shards on several tasks, and tables of embeddings made of them."""
