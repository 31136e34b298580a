// Files as this project writes them: tensors in safetensors, and what a host needs of a bundle's manifest.
#pragma once

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "clef_json.hpp"

namespace clef {

// A file's bytes, aligned for any tensor.
struct Bytes {
    std::unique_ptr<std::int64_t[]> words;
    std::size_t size = 0;

    explicit Bytes(std::size_t count) : words(new std::int64_t[count / 8 + 1]), size(count) {}
    char* data() { return reinterpret_cast<char*>(words.get()); }
    const char* data() const { return reinterpret_cast<const char*>(words.get()); }
    std::string_view text() const { return {data(), size}; }
};

inline Bytes read_file(const std::filesystem::path& path) {
    std::error_code fault;
    auto size = std::filesystem::file_size(path, fault);
    std::ifstream file(path, std::ios::binary);
    if (fault || !file) throw Error(Kind::bundle, path.string() + " cannot be read");
    Bytes result(static_cast<std::size_t>(size));
    if (!file.read(result.data(), static_cast<std::streamsize>(size)))
        throw Error(Kind::bundle, path.string() + " cannot be read in full");
    return result;
}

// The tensors of a safetensors file. They point into `bytes`, which moves with this.
struct TensorFile {
    Bytes bytes;
    std::vector<Tensor> tensors;
    std::map<std::string, std::string> metadata;  // "questions": JSON, per record its questions with their option ids
};

// Throws Error(bundle) for what is no safetensors, holds other types than int64 and float32, or is not aligned.
inline TensorFile parse_safetensors(Bytes bytes, const std::string& where) {
    std::uint64_t length = 0;
    if (bytes.size >= 8) std::memcpy(&length, bytes.data(), 8);
    if (bytes.size < 8 || length > bytes.size - 8)
        throw Error(Kind::bundle, where + " is no safetensors file, or truncated");
    const std::size_t start = 8 + static_cast<std::size_t>(length), room = bytes.size - start;
    Json header = Json::parse(bytes.text().substr(8, length), where);
    TensorFile result{std::move(bytes), {}, {}};
    for (const auto& [name, record] : header.object()) {
        if (name == "__metadata__") {
            for (const auto& [key, value] : record.object()) result.metadata[key] = value.string();
            continue;
        }
        const std::string& dtype = record.at("dtype").string();
        if (dtype != "I64" && dtype != "F32")
            throw Error(Kind::bundle, where + ": " + name + " is " + dtype + "; expected I64 or F32");
        Tensor tensor{name, dtype == "I64" ? Type::int64 : Type::float32, {}, nullptr};
        std::size_t most = room / size_of(tensor.type), count = 1;  // numbers the file has room for
        bool fits = true;
        for (const auto& size : record.at("shape").array()) {
            tensor.shape.push_back(size.integer());
            fits = fits && size.integer() > 0 && static_cast<std::size_t>(size.integer()) <= most / count;
            if (fits) count *= static_cast<std::size_t>(size.integer());
        }
        const auto& ends = record.at("data_offsets").array();
        if (!fits || ends.size() != 2 || ends[0].integer() < 0 || ends[1].integer() < ends[0].integer() ||
            static_cast<std::size_t>(ends[1].integer()) > room ||
            static_cast<std::size_t>(ends[1].integer() - ends[0].integer()) != tensor.bytes())
            throw Error(Kind::bundle, where + ": " + name + " does not fit its place or the file");
        tensor.data = result.bytes.data() + start + ends[0].integer();
        if (reinterpret_cast<std::uintptr_t>(tensor.data) % size_of(tensor.type) != 0)
            throw Error(Kind::bundle, where + ": " + name + " is not aligned; write it with clef-trt encode");
        result.tensors.push_back(std::move(tensor));
    }
    return result;
}

inline TensorFile read_safetensors(const std::filesystem::path& path) {
    return parse_safetensors(read_file(path), path.string());
}

// One input or output of a graph; an axis without a name has that size.
struct Axis {
    std::string name;
    std::int64_t size;
};
struct TensorRecord {
    std::string name;
    Type type;
    std::vector<Axis> axes;
};

// A bundle's text graph. Opening checks that every file is there and of its size; `clef-trt verify --files` hashes.
struct Bundle {
    std::string precision;
    std::filesystem::path graph, weights;  // weights: the real folder that the graph's external data is relative to
    std::vector<TensorRecord> inputs, outputs;
};

inline std::vector<TensorRecord> read_records(const Json& list) {
    std::vector<TensorRecord> result;
    for (const auto& item : list.array()) {
        const std::string& dtype = item.at("dtype").string();
        if (dtype != "int64" && dtype != "float32")
            throw Error(Kind::bundle, "the graph has a tensor of " + dtype + "; expected int64 or float32");
        TensorRecord record{item.at("name").string(), dtype == "int64" ? Type::int64 : Type::float32, {}};
        for (const auto& axis : item.at("axes").array())
            record.axes.push_back(axis.is_string() ? Axis{axis.string(), 0} : Axis{"", axis.integer()});
        result.push_back(std::move(record));
    }
    return result;
}

inline void check_files(const std::filesystem::path& folder, const Json& files) {
    for (const auto& [name, record] : files.object()) {
        std::filesystem::path relative(name);
        bool inside = !relative.is_absolute();
        for (const auto& part : relative) inside = inside && part != "..";
        if (!inside)
            throw Error(Kind::bundle, "the manifest names " + name + ": only paths inside its folder are allowed");
        std::error_code fault;
        auto size = std::filesystem::file_size(folder / relative, fault);
        if (fault) throw Error(Kind::bundle, (folder / relative).string() + " is missing");
        if (static_cast<std::int64_t>(size) != record.at("size_bytes").integer())
            throw Error(Kind::bundle, (folder / relative).string() + " has " + std::to_string(size) +
                                          " bytes, the manifest says " +
                                          std::to_string(record.at("size_bytes").integer()));
    }
}

// Opens the bundle in `folder`; `weights` re-points a moved release. Throws Error(bundle).
inline Bundle open_bundle(const std::filesystem::path& folder, const std::filesystem::path& weights = {}) {
    const auto path = folder / "manifest.json";
    const Bytes content = read_file(path);
    const Json manifest = Json::parse(content.text(), path.string());
    if (manifest.at("format_version").integer() != 1)
        throw Error(Kind::bundle, path.string() + " is of another format version than 1");
    const Json& recorded = manifest.at("weights");
    // An absolute root stays itself.
    const auto root = weights.empty() ? folder / recorded.at("root").string() : weights;
    check_files(folder, manifest.at("files"));
    check_files(root, recorded.at("files"));
    const Json& text = manifest.at("graphs").at("text");
    if (!manifest.at("files").has(text.at("file").string()))
        throw Error(Kind::bundle, path.string() + ": its text graph is not among its files");
    // ONNX Runtime refuses external data behind links that leave this folder, so it is given the folder's real path.
    std::error_code fault;
    const auto real = std::filesystem::canonical(root, fault);
    if (fault) throw Error(Kind::bundle, root.string() + " does not exist; the weights were in it");
    return Bundle{manifest.at("precision").string(), folder / text.at("file").string(), real,
                  read_records(text.at("inputs")), read_records(text.at("outputs"))};
}

}  // namespace clef
