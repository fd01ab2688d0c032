"""What a resumed run needs: checkpoints, atomic files and random states."""
