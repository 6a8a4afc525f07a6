"""Figures, one module each: functions compute the numbers, and draw them.

attention          attention maps of classes on images
class_features     features of each class: their t-SNE, and how similar the classes are
image_sheets       images with labels: contact sheet, predicted and true labels, most confident mistakes
label_correlation  learned and true label correlations
label_coverage     how many clients of a round have each label
label_statistics   labels per sample, co-occurrence of classes, and positives of each class at each client
pseudo_labels      pseudo-labels by round and by class
site_labels        labels of each site and class, for data from several sites
"""
