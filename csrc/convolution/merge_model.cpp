#include "convolution/merge_model.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <vector>

namespace torch_convfix {
namespace {

using Features = std::array<double, 7>;

// The TPU compiler's estimate of a convolution with merged groups: log2 of merged over direct cycles.
struct MergeSample {
  Features features;
  double log2_ratio;
};

#include "convolution/merge_samples.inc"

// Gaussian process regression with zero mean, which is to say: as good as direct, where nothing like it
// was measured. Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, algorithm 2.1.
class MergeModel {
 public:
  template <size_t n>
  explicit MergeModel(const MergeSample (&samples)[n]) {
    for (const auto& sample : samples) {
      features_.push_back(sample.features);
      whitened_.push_back(sample.log2_ratio);
    }
    variance_ = std::inner_product(whitened_.begin(), whitened_.end(), whitened_.begin(), 0.0) / n;
    // Cholesky factor of the samples' covariance, row by row: a row solves against those above it.
    for (size_t i = 0; i < n; ++i) {
      auto row = covariances(features_[i], i);
      const double rest = solve(row);
      row.push_back(std::sqrt(rest + kNoise));
      factor_.push_back(std::move(row));
    }
    solve(whitened_);
  }

  // What log2 of merged over direct will hardly exceed: the mean and some deviations.
  double predict(const Features& features) const {
    auto v = covariances(features, features_.size());
    const double rest = solve(v);
    const double mean = std::inner_product(v.begin(), v.end(), whitened_.begin(), 0.0);
    return mean + kDeviations * std::sqrt(std::max(rest, 0.0));
  }

 private:
  std::vector<double> covariances(const Features& features, size_t count) const {
    std::vector<double> found(count);
    for (size_t i = 0; i < count; ++i) {
      double distance = 0;
      for (size_t j = 0; j < features.size(); ++j) {
        distance += (features[j] - features_[i][j]) * (features[j] - features_[i][j]);
      }
      found[i] = variance_ * std::exp(-distance / (2 * kLength * kLength));
    }
    return found;
  }

  // v becomes L^-1 v; returns the variance that v leaves.
  double solve(std::vector<double>& v) const {
    double rest = variance_;
    for (size_t i = 0; i < v.size(); ++i) {
      v[i] -= std::inner_product(v.begin(), v.begin() + i, factor_[i].begin(), 0.0);
      v[i] /= factor_[i][i];
      rest -= v[i] * v[i];
    }
    return rest;
  }

  std::vector<Features> features_;
  std::vector<std::vector<double>> factor_;
  std::vector<double> whitened_;
  double variance_;
};

// The largest divisor of the groups that gives merged groups of at most `width` input channels.
int64_t merge_factor(const Form& form, int64_t width) {
  int64_t factor = std::clamp(width / form.w[1], int64_t{1}, form.groups);
  while (form.groups % factor != 0) {
    --factor;
  }
  return factor;
}

Features features_of(const Form& form, int64_t merge) {
  const auto product = [](at::IntArrayRef sizes) { return c10::multiply_integers(sizes); };
  const std::array<int64_t, 7> sizes{
      form.w[1],
      form.x[1],
      product(at::IntArrayRef(form.g).slice(2)),
      product(at::IntArrayRef(form.w).slice(2)),
      product(form.stride),
      form.x[0],
      merge};
  Features features;
  std::transform(sizes.begin(), sizes.end(), features.begin(), [](int64_t size) {
    return std::log2(std::max<int64_t>(size, 1));
  });
  return features;
}

MergeFactors predict_merge(const Form& form) {
  static const std::array<MergeModel, 3> models{
      MergeModel(kForward), MergeModel(kInputGrad), MergeModel(kWeightGrad)};
  // One factor for all three: they share operands, and with another factor those have another layout.
  std::array<int64_t, 3> best{1, 1, 1};
  double lowest = 0;
  for (const int64_t width : kWidths) {
    const int64_t factor = merge_factor(form, width);
    std::array<int64_t, 3> factors{1, 1, 1};
    double total = 0;
    for (size_t i = 0; factor > 1 && i < models.size(); ++i) {
      const double predicted = models[i].predict(features_of(form, factor));
      if (predicted < kLeastGain) {
        factors[i] = factor;
        total += predicted;
      }
    }
    if (total < lowest) {
      lowest = total;
      best = factors;
    }
  }
  return {best[0], best[1], best[2]};
}

}  // namespace

MergeFactors choose_merge(const Form& form) {
  // A prediction takes four times as long as tracing, and a step is traced over and over.
  thread_local std::map<Features, MergeFactors> known;
  const auto [found, is_new] = known.try_emplace(features_of(form, form.groups));
  if (is_new) {
    found->second = predict_merge(form);
  }
  return found->second;
}

}  // namespace torch_convfix
