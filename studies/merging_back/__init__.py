"""Is an adapter lost when it is merged back into 4 bits?"""
