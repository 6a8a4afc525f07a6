"""Figures, one module each: functions compute the numbers, and draw them.

attention            attention maps of classes on images
class_features       features of each class, and their t-SNE
class_similarity     cosines between class vectors and between class features
example_predictions  images with predicted and true labels
mistakes             the most confident mistakes
label_correlation    learned and true label correlations
label_coverage       how many clients of a round have each label
label_map            positives of each class at each client
label_statistics     labels per sample and co-occurrence of classes
contact_sheet        images of a dataset with their labels
pseudo_labels        pseudo-labels by round and by class
"""
