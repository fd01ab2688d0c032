"""Does a 1.5B policy learn as well on four bits?"""
