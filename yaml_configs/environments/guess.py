"""Guess a number of 0 to 6 in three turns."""


class Guess:
    """Says after each guess whether the number is lower (<) or higher (>)."""

    def reset(self, row, rng):
        self.number, self.left = row["number"], 3

    def step(self, turn):
        self.left -= 1
        guess = int(turn.text) if turn.text in tuple("0123456") else 7
        if guess == self.number:
            return "", 1.0, True
        return "<" if guess > self.number else ">", 0.0, self.left == 0
