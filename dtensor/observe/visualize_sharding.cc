#include "shardweave/dtensor/observe/visualize_sharding.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace shardweave {
namespace {

using Index = std::vector<int64_t>;  // coordinates on some mesh dimensions

// --- what there is to draw -----------------------------------------------------------------------

constexpr int64_t kMaxCombinations = 4096;  // of coordinates that are looked at one by one

struct Piece {
  Interval interval;
  Index owner;          // coordinates on Axis::cuts
  int owner_index = 0;  // equal for equal owners, counted from 0
};

// One drawn dimension.
struct Axis {
  int dim = -1;  // of the tensor; -1: it has fewer
  int64_t size = 1;
  std::vector<int> cuts;  // mesh dimensions, outermost first
  // Ascending; where one does not begin at its predecessor's end, some are left out.
  std::vector<Piece> pieces;
  int num_owners = 0;

  bool gap_before(size_t i) const {
    return pieces[i].interval.begin != (i == 0 ? 0 : pieces[i - 1].interval.end);
  }
  bool gap_at_end() const { return !pieces.empty() && pieces.back().interval.end != size; }
};

struct Picture {
  Layout layout;  // with tensor dimensions counted from the front
  const DeviceMesh& mesh;
  Index shape;
  const VisualizeOptions& options;
  Axis rows, columns;
};

int64_t count(const DeviceMesh& mesh, absl::Span<const int> dims) {
  int64_t n = 1;
  for (int m : dims) n *= mesh.size(m);
  return n;
}

// The n-th combination of coordinates on `dims`, the last fastest.
Index combination(const DeviceMesh& mesh, absl::Span<const int> dims, int64_t n) {
  Index index(dims.size());
  for (size_t i = dims.size(); i-- > 0;) {
    index[i] = n % mesh.size(dims[i]);
    n /= mesh.size(dims[i]);
  }
  return index;
}

Axis make_axis(const Layout& layout, const DeviceMesh& mesh, absl::Span<const int64_t> shape,
               int dim, int max_pieces) {
  Axis axis;
  axis.dim = dim;
  if (dim < 0) {
    axis.pieces.push_back({{0, 1}, {}});
    axis.num_owners = 1;
    return axis;
  }
  axis.size = shape[dim];
  const auto cuts = layout.shards_of(dim);
  axis.cuts.assign(cuts.begin(), cuts.end());
  const int64_t all = count(mesh, axis.cuts);
  for (int64_t n = 0; n < all; ++n) {
    if (all > kMaxCombinations && n == max_pieces) n = all - max_pieces;
    const Index owner = combination(mesh, axis.cuts, n);
    Coordinate coordinate(mesh.ndim(), 0);
    for (size_t i = 0; i < owner.size(); ++i) coordinate[axis.cuts[i]] = owner[i];
    for (const Interval& interval : local_intervals(layout, mesh.shape(), coordinate, shape, dim)) {
      axis.pieces.push_back({interval, owner});
    }
  }
  if (axis.size == 0) axis.pieces.push_back({{0, 0}, combination(mesh, axis.cuts, 0)});
  std::sort(axis.pieces.begin(), axis.pieces.end(),
            [](const Piece& a, const Piece& b) { return a.interval.begin < b.interval.begin; });
  if (static_cast<int>(axis.pieces.size()) > max_pieces) {
    const int first = (max_pieces + 1) / 2;
    axis.pieces.erase(axis.pieces.begin() + first, axis.pieces.end() - (max_pieces - first));
  }
  for (Piece& piece : axis.pieces) {
    const auto same = std::find_if(axis.pieces.data(), &piece,
                                   [&](const Piece& p) { return p.owner == piece.owner; });
    piece.owner_index = same == &piece ? axis.num_owners++ : same->owner_index;
  }
  return axis;
}

absl::StatusOr<std::pair<int, int>> drawn_dims(const Layout& layout,
                                               absl::Span<const int64_t> shape,
                                               const VisualizeOptions& options) {
  const int ndim = static_cast<int>(shape.size());
  if (options.dims.has_value()) {
    const auto [row, column] = *options.dims;
    if (row < 0 || row >= ndim || column < 0 || column >= ndim || row == column) {
      return absl::InvalidArgumentError(
          absl::StrCat("visualize_sharding: dims ", row, " and ", column,
                       ": wanted two different ones of the tensor's ", ndim));
    }
    return *options.dims;
  }
  if (ndim < 2) return std::pair(-1, ndim - 1);
  std::vector<int> dims(ndim);
  std::iota(dims.begin(), dims.end(), 0);
  std::stable_partition(dims.begin(), dims.end(),
                        [&](int d) { return !layout.shards_of(d).empty(); });
  return std::minmax({dims[0], dims[1]});
}

absl::StatusOr<Picture> make_picture(const Layout& given, const DeviceMesh& mesh,
                                     absl::Span<const int64_t> shape,
                                     const VisualizeOptions& options) {
  const absl::StatusOr<Layout> counted = with_dims_of(given, static_cast<int>(shape.size()));
  if (!counted.ok()) return counted.status();
  const Layout& layout = *counted;
  if (absl::Status fits = validate(layout, mesh.shape(), shape); !fits.ok()) return fits;
  if (options.max_pieces < 2 || options.max_ranks < 1) {
    return absl::InvalidArgumentError(absl::StrCat("visualize_sharding: max_pieces ",
                                                   options.max_pieces, " and max_ranks ",
                                                   options.max_ranks, ": wanted at least 2 and 1"));
  }
  const auto dims = drawn_dims(layout, shape, options);
  if (!dims.ok()) return dims.status();
  return Picture{layout,
                 mesh,
                 {shape.begin(), shape.end()},
                 options,
                 make_axis(layout, mesh, shape, dims->first, options.max_pieces),
                 make_axis(layout, mesh, shape, dims->second, options.max_pieces)};
}

// --- words ---------------------------------------------------------------------------------------

std::string range(const Piece& piece) {
  return absl::StrCat(piece.interval.begin, ":", piece.interval.end);
}

std::string heading(const Picture& p) {
  return absl::StrCat("[", absl::StrJoin(p.shape, ", "), "] as ", p.layout.to_string(), " on ",
                      p.mesh.to_string());
}

// The ranks of one piece: "0, 1", "0 + 1", "0 | 2", "0 … 63 (64 ranks)".
std::string ranks(const Picture& p, const Piece& row, const Piece& column) {
  Coordinate coordinate(p.mesh.ndim(), 0);
  for (const auto& [axis, piece] : {std::pair(&p.rows, &row), std::pair(&p.columns, &column)}) {
    for (size_t i = 0; i < axis->cuts.size(); ++i) coordinate[axis->cuts[i]] = piece->owner[i];
  }
  // What the free mesh dimensions do, the outermost separator first.
  std::array<std::vector<int>, 3> free;
  constexpr std::array<std::string_view, 3> kSeparators = {" | ", ", ", " + "};
  for (int m = 0; m < p.mesh.ndim(); ++m) {
    const Placement& placement = p.layout[m];
    if (placement.is_shard(p.rows.dim) || placement.is_shard(p.columns.dim)) continue;
    free[placement.is_shard() ? 0 : placement.is_replicate() ? 1 : 2].push_back(m);
  }
  std::vector<int> all;
  for (const std::vector<int>& dims : free) all.insert(all.end(), dims.begin(), dims.end());
  const auto rank = [&](int64_t n) {
    const Index index = combination(p.mesh, all, n);
    for (size_t i = 0; i < all.size(); ++i) coordinate[all[i]] = index[i];
    return p.mesh.rank_at(coordinate)->value;
  };
  const int64_t total = count(p.mesh, all);
  if (total > p.options.max_ranks) {
    return absl::StrCat(rank(0), " … ", rank(total - 1), " (", total, " ranks)");
  }
  const int64_t summands = count(p.mesh, free[2]);
  const int64_t alike = summands * count(p.mesh, free[1]);
  std::string text;
  for (int64_t n = 0; n < total; ++n) {
    if (n > 0) text += kSeparators[n % alike == 0 ? 0 : n % summands == 0 ? 1 : 2];
    absl::StrAppend(&text, rank(n));
  }
  return text;
}

// What each mesh dimension does, a line each.
std::vector<std::string> legend(const Picture& p) {
  std::vector<std::string> lines;
  for (int m = 0; m < p.mesh.ndim(); ++m) {
    const Placement& placement = p.layout[m];
    std::string what = "copies, written \"a, b\"";
    if (placement.is_partial()) {
      what = "each rank holds a part of the reduction, written \"a + b\"";
    } else if (placement.is_shard(p.rows.dim)) {
      what = "cuts the rows";
    } else if (placement.is_shard(p.columns.dim)) {
      what = p.rows.dim < 0 ? "cuts it" : "cuts the columns";
    } else if (placement.is_shard()) {
      what = absl::StrCat("cuts dimension ", placement.dim(), ", not drawn, written \"a | b\"");
    }
    lines.push_back(absl::StrCat(std::string(p.mesh.name(m)), "=", p.mesh.size(m), "  ",
                                 placement.to_string(), ": ", what));
  }
  if (p.shape.size() > 2) {
    lines.push_back(
        absl::StrCat("rows: dimension ", p.rows.dim, ", columns: dimension ", p.columns.dim));
  }
  if (p.mesh.size() > kMaxCombinations) return lines;
  std::vector<int> dims(p.mesh.ndim());
  std::iota(dims.begin(), dims.end(), 0);
  std::vector<int64_t> idle;
  for (int64_t n = 0; n < p.mesh.size(); ++n) {
    const Index index = combination(p.mesh, dims, n);
    const Dims local = local_shape(p.layout, p.mesh.shape(), index, p.shape);
    if (std::find(local.begin(), local.end(), 0) == local.end()) continue;
    idle.push_back(p.mesh.rank_at(index)->value);
  }
  if (idle.empty()) return lines;
  const size_t named = std::min<size_t>(idle.size(), p.options.max_ranks);
  lines.push_back(absl::StrCat(
      "nothing on ", idle.size() == 1 ? "rank " : "ranks ",
      absl::StrJoin(idle.begin(), idle.begin() + named, ", "),
      named < idle.size() ? absl::StrCat(" … (", idle.size(), " ranks)") : std::string()));
  return lines;
}

// Of 8 colours; the same for all pieces of an owner, another for their neighbours.
int color(const Picture& p, const Piece& row, const Piece& column) {
  if (p.rows.num_owners * p.columns.num_owners <= 8) {
    return row.owner_index * p.columns.num_owners + column.owner_index;
  }
  return (row.owner_index * 3 + column.owner_index) % 8;
}

// `total`, shared out by the sizes of the pieces, at least `least` each.
std::vector<int64_t> extents(const Axis& axis, int64_t total, const std::vector<int64_t>& least) {
  int64_t shown = 0;
  for (const Piece& piece : axis.pieces) shown += piece.interval.size();
  std::vector<int64_t> result;
  for (size_t i = 0; i < axis.pieces.size(); ++i) {
    const double share = shown == 0 ? 1.0
                                    : static_cast<double>(axis.pieces[i].interval.size()) /
                                          static_cast<double>(shown);
    result.push_back(std::max<int64_t>(least[i], std::llround(static_cast<double>(total) * share)));
  }
  return result;
}

// --- text ----------------------------------------------------------------------------------------

// Characters of UTF-8, all of width 1 here.
int64_t width(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

std::string repeated(std::string_view text, int64_t times) {
  std::string result;
  for (int64_t i = 0; i < times; ++i) result += text;
  return result;
}

std::string centered(const std::string& text, int64_t columns) {
  const int64_t blanks = columns - width(text);
  return std::string(blanks / 2, ' ') + text + std::string(blanks - blanks / 2, ' ');
}

// A column or a line of the grid: a piece, or what stands for pieces that are left out.
struct Track {
  const Piece* piece;  // null: left out
  int64_t extent;      // characters
};

std::vector<Track> tracks(const Axis& axis, const std::vector<int64_t>& sizes, int64_t gap) {
  std::vector<Track> result;
  for (size_t i = 0; i < axis.pieces.size(); ++i) {
    if (axis.gap_before(i)) result.push_back({nullptr, gap});
    result.push_back({&axis.pieces[i], sizes[i]});
  }
  if (axis.gap_at_end()) result.push_back({nullptr, gap});
  return result;
}

std::string painted(const std::string& text, int color, bool colors) {
  if (!colors) return text;
  constexpr std::array<int, 8> kPastels = {153, 223, 157, 218, 229, 189, 158, 252};
  return absl::StrCat("\x1b[38;5;16;48;5;", kPastels[color], "m", text, "\x1b[0m");
}

std::string text_of(const Picture& p) {
  constexpr int64_t kWidth = 56, kHeight = 8;
  std::vector<int64_t> least_widths;
  for (const Piece& column : p.columns.pieces) {
    int64_t least = width(range(column));
    for (const Piece& row : p.rows.pieces) least = std::max(least, width(ranks(p, row, column)));
    least_widths.push_back(least + 2);
  }
  const std::vector<Track> columns =
      tracks(p.columns, extents(p.columns, kWidth, least_widths), /*gap=*/3);
  const std::vector<Track> rows = tracks(p.rows,
                                         extents(p.rows, p.rows.pieces.size() == 1 ? 1 : kHeight,
                                                 std::vector<int64_t>(p.rows.pieces.size(), 1)),
                                         /*gap=*/1);

  int64_t margin = 0;
  if (p.rows.dim >= 0) {
    for (const Piece& row : p.rows.pieces) margin = std::max(margin, width(range(row)) + 1);
  }
  const auto line = [&](std::string_view left, std::string_view middle, std::string_view right) {
    std::string text = std::string(margin, ' ') + std::string(left);
    for (size_t j = 0; j < columns.size(); ++j) {
      if (j > 0) text += middle;
      text += repeated("─", columns[j].extent);
    }
    return text + std::string(right) + "\n";
  };

  std::string text = heading(p) + "\n";
  if (p.columns.dim >= 0) {
    std::string header(margin, ' ');
    for (const Track& c : columns) {
      header += " " + centered(c.piece == nullptr ? "" : range(*c.piece), c.extent);
    }
    header.erase(header.find_last_not_of(' ') + 1);
    text += header + "\n";
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    text += i == 0 ? line("┌", "┬", "┐") : line("├", "┼", "┤");
    for (int64_t y = 0; y < rows[i].extent; ++y) {
      const bool middle = y == (rows[i].extent - 1) / 2;
      const std::string label =
          middle && rows[i].piece != nullptr && p.rows.dim >= 0 ? range(*rows[i].piece) + " " : "";
      text += std::string(margin - width(label), ' ') + label;
      for (const Track& c : columns) {
        text += "│";
        if (rows[i].piece == nullptr || c.piece == nullptr) {
          text += centered(rows[i].piece == nullptr ? "⋮" : middle ? "⋯" : "", c.extent);
          continue;
        }
        text +=
            painted(centered(middle ? ranks(p, *rows[i].piece, *c.piece) : std::string(), c.extent),
                    color(p, *rows[i].piece, *c.piece), p.options.colors);
      }
      text += "│\n";
    }
  }
  text += line("└", "┴", "┘");
  for (const std::string& words : legend(p)) text += words + "\n";
  return text;
}

// --- SVG -----------------------------------------------------------------------------------------

std::string escaped(const std::string& text) {
  std::string result;
  for (char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

constexpr double kLetter = 0.56;  // width of a letter over the font's size, about

std::string words(double x, double y, std::string_view anchor, double size,
                  const std::string& text) {
  return absl::StrFormat(
      "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" font-size=\"%.1f\">%s</text>\n", x, y,
      std::string(anchor), size, escaped(text));
}

std::string svg_of(const Picture& p) {
  constexpr std::array<std::string_view, 8> kColors = {"#4e9af1", "#f0883e", "#3fb950", "#db61a2",
                                                       "#d4a72c", "#a371f7", "#39c5cf", "#8b949e"};
  constexpr double kFont = 13, kLine = 20, kPad = 16, kGrid = 560;
  constexpr int64_t kGap = 24;
  const double wide = p.columns.size > 0
                          ? static_cast<double>(p.rows.size) / static_cast<double>(p.columns.size)
                          : 1;
  const auto height_wanted = static_cast<int64_t>(
      p.rows.dim < 0
          ? 48
          : std::clamp(kGrid * wide,
                       48.0 * static_cast<double>(std::min<size_t>(p.rows.pieces.size(), 4)),
                       420.0));
  const std::vector<Track> columns =
      tracks(p.columns,
             extents(p.columns, static_cast<int64_t>(kGrid),
                     std::vector<int64_t>(p.columns.pieces.size(), 28)),
             kGap);
  const std::vector<Track> rows = tracks(
      p.rows, extents(p.rows, height_wanted, std::vector<int64_t>(p.rows.pieces.size(), 24)), kGap);
  const auto sum = [](const std::vector<Track>& all) {
    int64_t total = 0;
    for (const Track& track : all) total += track.extent;
    return static_cast<double>(total);
  };
  double margin = 0;
  if (p.rows.dim >= 0) {
    for (const Piece& row : p.rows.pieces) {
      margin = std::max(margin, static_cast<double>(width(range(row))) * kFont * kLetter + 10);
    }
  }
  const std::vector<std::string> notes = legend(p);
  double text_width = static_cast<double>(width(heading(p))) * (kFont + 1) * 0.6;
  for (const std::string& note : notes) {
    text_width = std::max(text_width, static_cast<double>(width(note)) * kFont * kLetter);
  }
  const double left = kPad + margin, top = kPad + 2 * kLine + 8;
  const double total_width = std::max(left + sum(columns), kPad + text_width) + kPad;
  const double bottom = top + sum(rows);
  const double total_height = bottom + 8 + kLine * static_cast<double>(notes.size()) + kPad;

  const std::string description = absl::StrJoin(notes, "; ");
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
      "height=\"%.0f\" class=\"shardweave-sharding\" role=\"img\" "
      "font-family=\"system-ui, sans-serif\">\n"
      "<title>%s</title>\n<desc>%s</desc>\n"
      "<style>.shardweave-sharding{color:#1f2328}"
      "@media(prefers-color-scheme:dark){.shardweave-sharding{color:#e6edf3}}"
      ".shardweave-sharding text{fill:currentColor}"
      ".shardweave-sharding rect{stroke:currentColor;stroke-opacity:.6;fill-opacity:.4}</style>\n",
      total_width, total_height, total_width, total_height, escaped(heading(p)),
      escaped(description));
  svg += words(kPad, kPad + kFont, "start", kFont + 1, heading(p));
  double y = top;
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto height = static_cast<double>(rows[i].extent);
    const Piece* row = rows[i].piece;
    if (row != nullptr && p.rows.dim >= 0) {
      svg += words(left - 6, y + height / 2 + kFont / 3, "end", kFont, range(*row));
    }
    double x = left;
    for (const Track& c : columns) {
      const auto cell = static_cast<double>(c.extent);
      if (i == 0 && c.piece != nullptr && p.columns.dim >= 0) {
        const double size =
            std::min(kFont, cell / (static_cast<double>(width(range(*c.piece))) * kLetter));
        svg += words(x + cell / 2, top - 6, "middle", size, range(*c.piece));
      }
      if (row == nullptr || c.piece == nullptr) {
        svg += words(x + cell / 2, y + height / 2 + kFont / 3, "middle", kFont,
                     row == nullptr ? "⋮" : "⋯");
      } else {
        const std::string label = ranks(p, *row, *c.piece);
        std::string where =
            p.columns.dim < 0 ? "" : absl::StrCat("columns ", range(*c.piece), ": ");
        if (p.rows.dim >= 0) where = absl::StrCat("rows ", range(*row), ", ", where);
        svg += absl::StrFormat(
            "<g><title>%s</title><rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" "
            "fill=\"%s\"/>\n",
            escaped(absl::StrCat(where, "rank ", label)), x, y, cell, height,
            std::string(kColors[color(p, *row, *c.piece)]));
        const double fits = (cell - 4) / (static_cast<double>(width(label)) * kLetter);
        // What would be too small to read is left to the title.
        svg += words(x + cell / 2, y + height / 2 + kFont / 3, "middle",
                     std::clamp(fits, 8.0, kFont + 2), fits < 8 ? "…" : label);
        svg += "</g>\n";
      }
      x += cell;
    }
    y += height;
  }
  double note_y = bottom + 8 + kFont;
  for (const std::string& note : notes) {
    svg += words(kPad, note_y, "start", kFont, note);
    note_y += kLine;
  }
  return svg + "</svg>\n";
}

}  // namespace

absl::StatusOr<std::string> visualize_sharding_text(const Layout& layout, const DeviceMesh& mesh,
                                                    absl::Span<const int64_t> shape,
                                                    const VisualizeOptions& options) {
  const absl::StatusOr<Picture> picture = make_picture(layout, mesh, shape, options);
  if (!picture.ok()) return picture.status();
  return text_of(*picture);
}

absl::StatusOr<std::string> visualize_sharding_svg(const Layout& layout, const DeviceMesh& mesh,
                                                   absl::Span<const int64_t> shape,
                                                   const VisualizeOptions& options) {
  const absl::StatusOr<Picture> picture = make_picture(layout, mesh, shape, options);
  if (!picture.ok()) return picture.status();
  return svg_of(*picture);
}

absl::Status visualize_sharding(const Layout& layout, const DeviceMesh& mesh,
                                absl::Span<const int64_t> shape, VisualizeOptions options,
                                std::FILE* out) {
  options.colors |= terminal_colors(out);
  const absl::StatusOr<std::string> text = visualize_sharding_text(layout, mesh, shape, options);
  if (!text.ok()) return text.status();
  std::fwrite(text->data(), 1, text->size(), out);
  std::fflush(out);
  return absl::OkStatus();
}

bool terminal_colors(std::FILE* out) {
  const char* no_color = std::getenv("NO_COLOR");
  if (no_color != nullptr && *no_color != '\0') return false;
  const char* term = std::getenv("TERM");
  return ::isatty(::fileno(out)) != 0 && term != nullptr && std::string_view(term) != "dumb";
}

}  // namespace shardweave
