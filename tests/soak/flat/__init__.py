"""Flatness: does iteration 200 cost what iteration 20 did? And what does an iteration cost that is
done already?"""
