"""What I have built, chapter by chapter."""


# first: Mean
class Mean:
    def of(self):
        return 1


# first: mean
class mean(Mean):
    def of(self):
        return 1
