{{- /*
All classes of the chart, as JSON: manifest texts by class name. Sources: the files in classes/, and classes/partitions/class.yaml.in
for each profile in classes/partitions/profiles.yaml.
*/ -}}
{{- define "tessera.classes" }}
{{- $classes := dict }}
{{- range $path, $file := .Files.Glob "classes/*.yaml" }}
  {{- $_ := set $classes (trimSuffix ".yaml" (base $path)) (toString $file) }}
{{- end }}
{{- $partition := .Files.Get "classes/partitions/class.yaml.in" }}
{{- range $profile, $cards := fromYaml (.Files.Get "classes/partitions/profiles.yaml") }}
  {{- $name := print "gpu-inference-" (replace "." "-" $profile) }}
  {{- $_ := $partition | replace "NAME" $name | replace "PROFILE" $profile | replace "CARDS" $cards | set $classes $name }}
{{- end }}
{{- toJson $classes }}
{{- end }}
