"""Text: tokenizers, documents, and sequences packed from them."""
