"""A dataset of any items, for tests."""

from torch.utils.data import Dataset


class Items(Dataset):
    """Any items, with any attributes. A function among the items is called each time that its item is read."""

    def __init__(self, items, **attributes):
        self.items = self.keys = items  # keys: as of records in a database
        vars(self).update(attributes)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]() if callable(self.items[index]) else self.items[index]
